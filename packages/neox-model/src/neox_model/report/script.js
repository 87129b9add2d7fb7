document.querySelectorAll('figure').forEach(function(figure){
  var data=JSON.parse(figure.querySelector('.data').textContent);
  var plot=figure.querySelector('.plot'),tip=figure.querySelector('.tip'),cross=figure.querySelector('.cross');
  function show(event){
    var box=plot.getBoundingClientRect(),share=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width));
    var at=data.first+share*(data.last-data.first),lines=['iteration '+Math.round(at).toLocaleString('en')];
    data.lines.forEach(function(line){
      var low=0,high=line.at.length-1;
      while(high-low>1){var middle=(low+high)>>1;if(line.at[middle]<=at)low=middle;else high=middle;}
      var place=Math.abs(line.at[low]-at)<=Math.abs(line.at[high]-at)?low:high;
      if(Math.abs(line.at[place]-at)<=0.05*(data.last-data.first)+1)lines.push(line.label+': '+line.text[place]);
    });
    plot.querySelectorAll('.mark').forEach(function(mark){
      if(Math.abs(parseFloat(mark.style.left)-100*share)<1.2)lines.push(mark.title);
    });
    tip.textContent=lines.join('\n');tip.style.display='block';
    tip.style.right=share>0.5?'auto':'12px';tip.style.left=share>0.5?'72px':'auto';
    cross.style.left=100*share+'%';cross.style.display='block';
  }
  plot.addEventListener('pointermove',show);plot.addEventListener('pointerdown',show);
  plot.addEventListener('pointerleave',function(){tip.style.display=cross.style.display='none';});
});
